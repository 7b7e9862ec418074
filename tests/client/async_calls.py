"""Writes `dataplane/client/async_calls.py`, the calls of the async client, from those of `DataPlaneClient`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "dataplane" / "client" / "client.py"
CALLS = CLIENT.with_name("async_calls.py")
HEAD = '''"""The calls of `AsyncDataPlaneClient`. Generated from `client.py` by `make async-client`: do not edit."""

from __future__ import annotations

{imports}

P = ParamSpec("P")


class AsyncCalls:
    """The calls of `DataPlaneClient`, awaited."""

'''


def generated(source: str) -> str:
    """The module of the calls, from the text of `client.py`."""
    module = ast.parse(source)
    (client,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "DataPlaneClient"]
    methods = [node for node in client.body if isinstance(node, ast.FunctionDef)]
    calls = [node for node in methods if node.name == "perform" or "self.perform(" in ast.unparse(node)]
    text = HEAD.format(imports=_imports(module, calls)) + "\n".join(_awaited(source, call) for call in calls)
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "-q", "-"]
        text = subprocess.run(ruff, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return text


def _awaited(source: str, call: ast.FunctionDef) -> str:
    """The method as a coroutine. Its docstring refers to the sync one's."""
    lines = source.splitlines(keepends=True)
    docstring, body = call.body[0], call.body[1:]
    head = "".join(lines[call.lineno - 1 : docstring.lineno - 1]).replace("def ", "async def ", 1)
    rest = "".join(lines[body[0].lineno - 1 : call.end_lineno]).replace("self.perform(", "await self.perform(")
    if call.name == "perform":
        rest = "        raise NotImplementedError\n"
    return f'{head}        """See `DataPlaneClient.{call.name}`."""\n{rest}'


def _imports(module: ast.Module, calls: list[ast.FunctionDef]) -> str:
    """The imports of the module that the signatures and bodies of the calls need."""
    used = {"ParamSpec"} | {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
    kept = []
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            kept += [ast.unparse(node)] if node.names else []
    return "\n".join(kept)


if __name__ == "__main__":
    CALLS.write_text(generated(CLIENT.read_text()))
