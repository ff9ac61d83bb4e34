"""test_exports.py LIBFURLONG HEADER... - what the shared object shows and needs, in TAP

Exactly the functions that the installed headers declare, each under the symbol version; nothing needed at run
time but libc and its own pieces; no code that has to be patched when it is loaded."""
import re
import subprocess
import sys

NEEDED = re.compile(r"^(libc\.so\.6|libm\.so\.6|libpthread\.so\.0|ld-linux[\w.-]*|lib(asan|ubsan|tsan)\.so\.\d+)$")


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def declared(paths):
    names = set()
    for path in paths:
        text = re.sub(r"/\*.*?\*/", "", open(path, encoding="utf-8").read(), flags=re.S)
        names |= set(re.findall(r"\b(furlong_\w+)\s*\(", text))
    return names


def main():
    library, headers = sys.argv[1], sys.argv[2:]
    shown = {line.split()[-1] for line in lines("nm", "-D", "--defined-only", library)}
    names = {s.split("@")[0] for s in shown if "@" in s and not s.startswith("FURLONG_")}
    bare = {s for s in shown if "@@" not in s and not s.startswith("FURLONG_")}
    dynamic = lines("readelf", "-d", library)
    needed = [m.group(1) for m in (re.search(r"\(NEEDED\).*\[(.*)\]", x) for x in dynamic) if m]
    cases = [
        ("exports exactly what the headers declare", sorted(names ^ declared(headers))),
        ("every symbol has a version", sorted(bare)),
        ("needs libc alone", [x for x in needed if not NEEDED.match(x)]),
        ("soname", [] if any("[libfurlong.so.1]" in x for x in dynamic) else ["not libfurlong.so.1"]),
        ("no text relocations", [x for x in dynamic if "TEXTREL" in x]),
    ]
    print(f"1..{len(cases)}")
    for i, (name, wrong) in enumerate(cases, 1):
        print(f"{'not ok' if wrong else 'ok'} {i} - {name}{': ' + ' '.join(wrong) if wrong else ''}")
    return any(wrong for _, wrong in cases)


sys.exit(main())
