"""Check a recipe's options and base checkpoint as its ranks will, and train nothing.

Reads a JSON object from stdin: ``recipe``, the module of the recipe; ``argv``, its arguments; ``env``, the
environment of the run. Writes one line: a JSON list of objects, each with the fields of a finding; empty:
nothing is wrong.
"""

import json
import sys
from dataclasses import asdict
from importlib import import_module

from manycpu.pipeline.recipes import causal_lm
from manycpu.pipeline.spec.errors import BadInputError, Finding

if __name__ == "__main__":
    request, findings = json.load(sys.stdin), []
    try:
        options = import_module(f"{request['recipe']}.options").parse(request["argv"], request["env"])
        if request["recipe"] == causal_lm.__name__:
            import_module(f"{causal_lm.__name__}.inputs").check_base(options)
    except BadInputError as error:
        findings = [asdict(Finding.of(error, "run.args"))]
    sys.stdout.write(f"\n{json.dumps(findings)}\n")
