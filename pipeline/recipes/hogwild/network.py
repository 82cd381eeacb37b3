"""The network of PyTorch's example, by the same names: its state fits that of models trained there."""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

__all__ = ["Net"]


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout: images of 28 x 28, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, kernel_size=5), nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, 28, 28) to the logarithms of probabilities, (batch, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)
