"""Settings: a block of plain assignments at the top of a script, overridden from the command line.

    python train.py config/mnist_daps.py config/short.py --max_steps=500

Files and --key=value apply from left to right. A file holds only assignments of literals; it is
read, never executed. Its first assignment may be base = "mnist.py": that file, in the same folder,
is read before it. Only names in the settings block can be set, and only to values of their type.
"""

import ast
import difflib
import os
import re
import sys
from contextlib import suppress


class UserError(Exception):
    """An error the user can fix; the message says what was found, what was wanted, what to do."""


def explain(kind, error, trace):
    """One line instead of a traceback, and exit code 2, for errors that are not bugs."""
    text, code = f"{kind.__name__} {error}", 2
    if issubclass(kind, BrokenPipeError):  # python eval.py ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if issubclass(kind, KeyboardInterrupt):
        message, code = "stopped", 130
    elif issubclass(kind, UserError):  # raised in a DataLoader worker, it comes after a traceback
        message = str(error).splitlines()[-1].removeprefix("configurator.UserError: ")
    elif issubclass(kind, OSError) and error.strerror:  # a missing file, a full disk
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif "DataLoader worker (pid" in text or "Dist" in kind.__name__ or "gloo" in text:
        message = "another process of this run died; --resume continues from the last checkpoint"
    elif "out of memory" in text or "can't allocate memory" in text:  # of a GPU, of the machine
        message = "out of memory; try --accumulate=2 or a smaller --batch_size"
    elif issubclass(kind, ModuleNotFoundError):  # of an optional package
        message = f"{error.name} is missing: pip install {error.name.replace('PIL', 'pillow')}"
    else:
        return sys.__excepthook__(kind, error, trace)
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    # Not sys.stderr: torch.distributed calls this hook with a buffer there, lost on exit.
    print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.__stderr__, flush=True)
    sys.exit(code)


sys.excepthook = explain


def configure(script, argv, may_be_zero=()):
    """Override the settings in `script`, the numbers, booleans and strings with a lower-case name
    in a module's globals(), by argv. Numbers must be positive; these, and those that are zero by
    default, may be zero. Returns all settings as a dict, and the arguments that are neither
    --key=value nor a .py file."""
    types = (int, float, bool, str)
    settings = {k: v for k, v in script.items() if k[0].islower() and type(v) in types}
    may_be_zero = {*may_be_zero, *(key for key, value in settings.items() if value == 0)}
    if "--help" in argv or "-h" in argv:
        print(script["__doc__"], "Settings:", sep="\n")
        with open(script["__file__"], encoding="utf-8") as file:
            comments = dict(re.findall(r"^ *(\w+) = .*?  # (.*)$", file.read(), re.MULTILINE))
        shown = {f"{key} = {value!r}": comments.get(key, "") for key, value in settings.items()}
        for setting, comment in shown.items():
            print(f"  {setting:{max(map(len, shown))}}  {comment}".rstrip())
        sys.exit(0)
    rest = []
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            kind = type(settings.get(key))
            if not equals and kind is not bool:
                raise UserError(f"{word}: write --{key or 'key'}=value (--help lists the settings)")
            with suppress(ValueError, SyntaxError, TypeError):  # not a literal: checked() says so
                if kind is not str:  # --resume, --resume=true and --resume=True are the same
                    value = ast.literal_eval(value.capitalize() if equals else "True")
            settings[key] = checked(key, value, settings, word)
        elif word.endswith(".py"):
            for key, value, where in read_config(word):
                settings[key] = checked(key, value, settings, where)
        else:
            rest.append(word)
    for key, value in settings.items():
        least = "zero or more" if key in may_be_zero else "positive"
        if type(value) in (int, float) and (value < 0 or value == 0 and least == "positive"):
            raise UserError(f"{key} is {value}, must be {least}")
    script.update(settings)
    return settings, rest


def checked(key, value, settings, where):
    """The value, if the setting exists and has this type."""
    if key not in settings:
        near = difflib.get_close_matches(key, settings, n=3, cutoff=0.7)
        hint = f"; did you mean {' or '.join(near)}?" if near else " (--help lists the settings)"
        raise UserError(f"{where}: there is no setting {key}{hint}")
    wanted = type(settings[key])
    value = float(value) if wanted is float and type(value) is int else value
    if type(value) is not wanted or value in (float("inf"), -float("inf")):
        like = f"{wanted.__name__}, like {settings[key]!r}"
        raise UserError(f"{where}: {key} must be of type {like}; found {value!r}")
    return os.path.expanduser(value) if wanted is str else value


def read_config(path, above=()):
    """The assignments of a config file, those of its base first: (key, value, file and line)."""
    if os.path.realpath(path) in above:
        raise UserError(f"config file {path}: it is its own base")
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"config file {path}: {reason}") from None
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    for statement in body:
        where = f"{path}, line {statement.lineno}"
        try:
            (target,) = statement.targets
            key, value = target.id, ast.literal_eval(statement.value)
        except (AttributeError, ValueError, TypeError):
            raise UserError(f"{where}: a config file holds only assignments like lr = 1") from None
        if key == "base" and statement is body[0]:
            base = os.path.join(os.path.dirname(path), str(value))
            yield from read_config(base, (*above, os.path.realpath(path)))
        else:
            yield key, value, where


def settings_block(path):
    """The settings of a script without running it: those that are literals, as a dict, and the
    names of those below "# may differ", which a resumed run may change."""
    with open(path, encoding="utf-8") as file:
        block = re.search(r"^# Settings.*?(?=^# ---)", file.read(), re.MULTILINE | re.DOTALL)[0]
    constants, may_differ = {}, ast.parse(block[block.index("# may differ") :]).body
    for statement in ast.parse(block).body:
        with suppress(ValueError):  # a computed value
            constants[statement.targets[0].id] = ast.literal_eval(statement.value)
    return constants, {statement.targets[0].id for statement in may_differ}
