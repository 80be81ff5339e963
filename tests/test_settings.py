"""Every setting of train.py does what it says, or is refused."""

import os

from conftest import ROOT

from configurator import TYPES


def settings_block():
    """The settings of train.py with their defaults."""
    with open(os.path.join(ROOT, "train.py")) as file:
        block = file.read().split("# what\n")[1].split("# -----")[0]
    names = {}
    exec("import os\nimport torch\nfrom data import DATA_DIR\n" + block, names)
    return {k: v for k, v in names.items() if k[0].islower() and type(v) in TYPES}
