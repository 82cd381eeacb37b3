"""A function as a task: train a small network on handwritten digits at several rates, and take the best."""

from typing import Any

from airflow.sdk import dag, task

STEPS = 100


def digits(rank: int, world_size: int) -> tuple[Any, Any, Any, Any]:
    """Return images and labels of this rank's share of scikit-learn's digits, then all those for testing.

    Images are rows of 64 pixels between 0 and 1.
    """
    import torch
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16  # the greatest value of a pixel
    test = len(labels) // 5  # number of digits for testing, which come first
    return images[test + rank :: world_size], labels[test + rank :: world_size], images[:test], labels[:test]


@dag(schedule=None, tags=["manycpu", "example"], doc_md=__doc__)
def sweep() -> None:
    @task.manycpu(nnodes=1, nproc_per_node=2, oversubscribe=True, max_active_tis_per_dag=1)
    def fit(lr: float) -> dict[str, float]:
        """Train with one rate; every rank calls this, and what rank 0 returns is the task's result."""
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from manycpu.pipeline.node.metrics import metrics, progress

        dist.init_process_group()
        torch.manual_seed(0)
        images, labels, test_images, test_labels = digits(dist.get_rank(), dist.get_world_size())
        network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(1, STEPS + 1):
            loss: Any = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                progress(step=step, total_steps=STEPS, loss=loss.item())
        accuracy = (network(test_images).argmax(1) == test_labels).float().mean().item()
        metrics({"accuracy": accuracy})
        dist.destroy_process_group()
        return {"lr": lr, "accuracy": accuracy}

    @task
    def best(results: Any) -> Any:
        """Return the result of the rate whose network recognises most of the digits for testing."""
        return max(results, key=lambda result: result["accuracy"])

    best(fit.expand(lr=[0.01, 0.1, 1.0]))


sweep()
