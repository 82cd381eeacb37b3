"""The shapes that texts in fields must have: as regular expressions for programs, and in words for people."""

from typing import Final

__all__ = ["AMOUNT", "FOLDER", "LABEL", "NAME", "WORDS"]

AMOUNT: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
"""Of memory or storage, as Kubernetes writes it."""
FOLDER: Final = r"^/.*[^/]$"
LABEL: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""What names of runs begin with."""
NAME: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
"""Of an object of Kubernetes."""
WORDS: Final = {
    AMOUNT: "an amount is needed, such as 8Gi or 500M",
    FOLDER: "an absolute path is needed, with no slash at its end",
    LABEL: "small letters, digits and hyphens are needed, with a letter first and no hyphen last",
    NAME: "small letters, digits, dots and hyphens are needed, with a letter or digit first and last",
}
