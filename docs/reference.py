"""Write the reference of fields from the fields themselves: ``python docs/reference.py``."""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import Resources, TrainingRun

PAGE = Path(__file__).with_name("fields.md")
PARTS: dict[str, type[BaseModel]] = {
    "run": TrainingRun,
    "run.resources": Resources,
    "target, kind: local": Local,
    "target, kind: baremetal": BareMetal,
    "target, kind: kubernetes": Kubernetes,
}


def page() -> str:
    """Write the whole page."""
    head = "# Fields of a run and of a target\n\nWritten by `make docs` from the fields' own descriptions.\n"
    return "\n".join([head, *(_part(name, model) for name, model in PARTS.items())])


def _part(name: str, model: type[BaseModel]) -> str:
    rows = [_row(field, info, model) for field, info in model.model_fields.items() if field != "kind"]
    head = f"## `{name}`\n\n{(model.__doc__ or '').strip()}\n\n"
    return head + "| field | default | what it is | examples |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _row(name: str, info: FieldInfo, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"][name]
    named = [value for kind in schema.get("anyOf", [schema]) for value in kind.get("enum", ())]
    choices = f" One of: {', '.join(f'`{value}`' for value in named)}." if named else ""
    examples = ", ".join(f"`{example}`" for example in info.examples or ())
    return f"| `{name}` | {_default(info)} | {info.description}{choices} | {examples} |\n"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    return "" if value is None or value in ((), {}) or isinstance(value, BaseModel) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
