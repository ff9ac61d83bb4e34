"""Variables that the installed SGLang does not read, each with the nearest that it does

python3 -m furlong_sglang.names: started by furlong-sglang beside the server, with the same Python and the same
environment. Releases rename variables, and an old name is passed over without a word. Nothing of SGLang is imported:
its sources are read."""
import difflib
import importlib.metadata
import importlib.util
import os
import re

PREFIXES = ("SGLANG_", "SGL_")
OURS = {"SGLANG_API_KEY"}  # of the adapter
NAME = re.compile(rb"\bSGL(?:ANG)?_[A-Z0-9_]+\b")
FILE_MAX = 4 << 20


def read_by(folders):
    """The names in the Python sources of a package."""
    names = set()
    for folder in folders:
        for base, _, files in os.walk(folder):
            for file in files:
                if file.endswith(".py"):
                    with open(os.path.join(base, file), "rb") as f:
                        names.update(NAME.findall(f.read(FILE_MAX)))
    return {n.decode() for n in names}


def version():
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def notes(environ):
    """One sentence for each variable that is not read. Without an SGLang here: none."""
    mine = sorted(n for n in environ if n.startswith(PREFIXES) and n not in OURS)
    spec = importlib.util.find_spec("sglang") if mine else None
    known = read_by(spec.submodule_search_locations or ()) if spec else set()
    if not known:
        return []
    bare = {n.partition("_")[2]: n for n in sorted(known)}  # prefixes are alike and say nothing
    said = []
    for name in mine:
        if name not in known:
            near = difflib.get_close_matches(name.partition("_")[2], bare, 1)
            said.append(f"note: SGLang {version()} does not read the variable {name}"
                        + (f"; the nearest that it reads is {bare[near[0]]}" if near else "")
                         + " (furlong job env shows what was given)")
    return said


if __name__ == "__main__":
    for line in notes(os.environ):
        print(line, flush=True)
