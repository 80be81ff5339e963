"""Settings: a block of plain assignments at the top of a script, overridden from the command line.

    python train.py config/mnist_daps.py config/short.py --max_steps=500

Files and --key=value apply from left to right. A file holds only assignments of literals; it is
read, never executed. Its first assignment may be base = "mnist.py": that file, in the same folder,
is read before it. Only names in the settings block can be set, and only to values of their type.

Any error that the user can fix is raised as UserError, which ends the program with one line.
"""

import ast
import difflib
import math
import os
import re
import sys

TYPES = (int, float, bool, str)
NOT_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class UserError(Exception):
    """An error the user can fix; the message says what was found, what was wanted, what to do."""


OTHER_PROCESSES = {  # signs in an error that another process died
    "DataLoader worker (pid": "a process that reads images died (killed, or out of memory)",
    "DistBackendError": "another process of this run died or cannot be reached",
    "DistNetworkError": "another process of this run died or cannot be reached",
    "DistStoreError": "another process of this run died or cannot be reached",
    "gloo": "another process of this run died or cannot be reached",
}


def explain(kind, error, trace):
    """One line instead of a traceback, and exit code 2, for errors that are not bugs."""
    sign = next((s for s in OTHER_PROCESSES if s in f"{kind.__name__} {error}"), None)
    if issubclass(kind, UserError):  # raised in a DataLoader worker, it comes after a traceback
        message = str(error).splitlines()[-1].removeprefix("configurator.UserError: ")
    elif sign:
        message = f"{OTHER_PROCESSES[sign]}; add --resume=True to continue from the last checkpoint"
    else:
        return sys.__excepthook__(kind, error, trace)
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    # Not sys.stderr: torch.distributed calls this hook with a buffer there, lost on exit.
    print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.__stderr__, flush=True)
    sys.exit(2)


sys.excepthook = explain


def configure(script, argv):
    """Override the settings in `script` (a module's globals()) by argv. Settings are its numbers,
    booleans and strings with a lower-case name.

    Returns all settings as a dict, and the arguments that are neither --key=value nor a .py file.
    """
    settings = {k: v for k, v in script.items() if k[0].islower() and type(v) in TYPES}
    if "--help" in argv or "-h" in argv:
        print(script["__doc__"], "Settings:", describe(script["__file__"], settings), sep="\n")
        sys.exit(0)
    rest = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                raise UserError(f"{word}: write --{key or 'key'}=value (--help lists the settings)")
            settings[key] = checked(key, from_text(settings.get(key), value), settings, word)
        elif word.endswith(".py"):
            for key, value, where in read_config(word):
                settings[key] = checked(key, value, settings, where)
        else:
            rest.append(word)
    script.update(settings)
    return settings, rest


def require(settings, *rules):
    """Rules (names, holds, wanted): the value of each named setting must satisfy holds."""
    for names, holds, wanted in rules:
        for key in names.split():
            if not holds(settings[key]):
                raise UserError(f"{key} is {settings[key]!r}, must be {wanted}")


def from_text(default, text):
    """A command-line value: the text itself for a string setting, else a Python literal."""
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except NOT_LITERAL:
        return text


def checked(key, value, settings, where):
    """The value, if the setting exists and has this type."""
    if key not in settings:
        near = difflib.get_close_matches(key, settings, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else " (--help lists the settings)"
        raise UserError(f"{where}: there is no setting {key}{hint}")
    wanted = type(settings[key])
    if wanted is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not wanted:
        like = f"{wanted.__name__}, like {settings[key]!r}"
        raise UserError(f"{where}: {key} must be of type {like}; found {value!r}")
    if wanted is float and not math.isfinite(value):
        raise UserError(f"{where}: {key} must be finite; found {value!r}")
    return value


def read_config(path, may_have_base=True):
    """The assignments of a config file, those of its base first: (key, value, file and line)."""
    try:
        with open(path, encoding="utf-8") as file:
            statements = ast.parse(file.read()).body
    except (OSError, *NOT_LITERAL) as error:
        reason = getattr(error, "strerror", None) or str(error) or "too deeply nested"
        raise UserError(f"config file {path}: {reason}") from None
    if statements and isinstance(statements[0], ast.Expr):
        statements = statements[1:]  # the docstring
    for i, statement in enumerate(statements):
        where = f"{path}, line {statement.lineno}"
        try:
            (target,) = statement.targets
            key, value = target.id, ast.literal_eval(statement.value)
        except (AttributeError, *NOT_LITERAL):
            message = f"{where}: a config file holds only assignments like max_steps = 500"
            raise UserError(message) from None
        if key != "base":
            yield key, value, where
        elif i == 0 and may_have_base and isinstance(value, str):
            yield from read_config(os.path.join(os.path.dirname(path), value), False)
        else:
            raise UserError(f"{where}: base names one file, comes first, and has no base itself")


def defaults(script):
    """The settings block of a script, without running it; computed values are left out."""
    with open(script, encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    settings = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            key, value = statement.targets[0].id, statement.value
            if key[0].islower() and isinstance(value, ast.Constant):
                settings[key] = value.value
        elif settings:
            break  # end of the block
    return settings


def describe(path, settings):
    """Every setting with its default and the comment beside it in the source."""
    with open(path, encoding="utf-8") as file:
        comments = dict(re.findall(r"^ *(\w+) = .*?  # (.*)$", file.read(), re.MULTILINE))
    rows = [(f"{key} = {value!r}", comments.get(key, "")) for key, value in settings.items()]
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:{width}}  {right}".rstrip() for left, right in rows)
