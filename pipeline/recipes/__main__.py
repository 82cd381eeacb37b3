"""Check a recipe's options: parse them as its ranks will, and train nothing.

Reads a JSON object from stdin: ``recipe``, the module of the recipe; ``argv``, its arguments; ``env``, the
environment of the run. Writes a line: a JSON list of what is wrong: ``field``, ``message`` and ``fix``.
"""

import json
import sys
from importlib import import_module

from manycpu.pipeline.spec.errors import BadInputError

if __name__ == "__main__":
    asked, wrong = json.load(sys.stdin), []
    try:
        import_module(f"{asked['recipe']}.options").parse(asked["argv"], asked["env"])
    except BadInputError as error:
        wrong = [{"field": error.field or "run.args", "message": error.message, "fix": error.fix or ""}]
    sys.stdout.write(f"\n{json.dumps(wrong)}\n")
