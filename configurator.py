"""Settings: a block of plain assignments at the top of a script, overridden from the command line.

    python train.py config/mnist_daps.py config/short.py --max_steps=500

Files and --key=value are applied from left to right. A file holds assignments of literals and
nothing else; it is read, never executed. Only names in the settings block may be set, and only to
values of their type. Whatever is wrong gets one line that says so, and exit code 2.
"""

import ast
import difflib
import math
import os
import re
import sys
import unicodedata

TYPES = (int, float, bool, str)
UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)  # as a literal


def die(message):
    """End the program over something the user can mend: one line, exit code 2."""
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr)
    sys.exit(2)


def configure(script, argv):
    """Override the settings in `script` (a module's globals()) by argv. Settings are its numbers,
    truth values and texts with a lower-case name.

    Returns all settings as a dict, and those arguments that are neither --key=value nor a .py file.
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
                die(f"{word}: write --{key or 'key'}=value (--help lists the settings)")
            settings[key] = checked(key, from_text(settings.get(key), value), settings, word)
        elif word.endswith(".py"):
            for key, value, place in read_config(word):
                settings[key] = checked(key, value, settings, place)
        else:
            rest.append(word)
    script.update(settings)
    return settings, rest


def from_text(default, text):
    """A command-line value: words for text settings, Python literals for the others."""
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except UNREADABLE:
        return text


def checked(key, value, settings, place):
    if key not in settings:
        near = difflib.get_close_matches(key, settings, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else " (--help lists the settings)"
        die(f"{place}: there is no setting {key}{hint}")
    wanted = type(settings[key])
    if wanted is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not wanted:
        like = f"{wanted.__name__}, like {settings[key]!r}"
        die(f"{place}: {key} must be of type {like}; found {value!r}")
    if wanted is float and not math.isfinite(value):
        die(f"{place}: {key} must be finite; found {value!r}")
    if wanted is str and any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        die(f"{place}: {key} must be text without control characters; found {value!r}")
    return value


def read_config(path):
    """The assignments of a config file as (key, value, where it stands)."""
    try:
        with open(path, encoding="utf-8") as file:
            statements = ast.parse(file.read()).body
    except (OSError, *UNREADABLE) as fault:
        reason = getattr(fault, "strerror", None) or str(fault) or "too deeply nested"
        die(f"config file {path}: {reason}")
    for i, line in enumerate(statements):
        if i == 0 and isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # the docstring
        place = f"{path}, line {line.lineno}"
        try:
            (target,) = line.targets
            yield target.id, ast.literal_eval(line.value), place
        except (AttributeError, *UNREADABLE):
            die(f"{place}: a config file holds only assignments like max_steps = 500")


def describe(path, settings):
    """Every setting with its default and the comment beside it in the source."""
    with open(path, encoding="utf-8") as file:
        comments = dict(re.findall(r"^ *(\w+) = .*?  # (.*)$", file.read(), re.MULTILINE))
    rows = [(f"{key} = {value!r}", comments.get(key, "")) for key, value in settings.items()]
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:{width}}  {right}".rstrip() for left, right in rows)
