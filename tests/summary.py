"""summary.py BROKEN LOG... - adds up meson's test logs; the last line is 'N passed, N failed, N skipped'.
summary.py --failed LOG - the names of the programs that failed in it, one a line.

A test that speaks TAP counts each of its cases, any other counts as one. BROKEN builds count as failures.
LOG may be FIRST,AGAIN: what AGAIN holds was run once more, alone, since it had failed in FIRST; it counts as it came out
then, and is named as unsteady if it passed. What failed said, the end of it, comes first. Exit code 1 when anything failed or nothing ran."""
import json
import re
import sys

CASE = re.compile(r"^(ok|not ok)\b(.*)$")


def cases(entry):
    """(passed, failed, skipped) of one test program, and the names of what failed or was skipped."""
    found = [m for m in map(CASE.match, (entry.get("stdout") or "").splitlines()) if m]
    ran_ok = entry["result"] in ("OK", "SKIP", "EXPECTEDFAIL") or entry.get("returncode") == 0
    skipped = [m.group(2).strip(" -") for m in found if m.group(1) == "ok" and "# SKIP" in m.group(2).upper()]
    failed = [m.group(2).strip(" -") for m in found if m.group(1) == "not ok"]
    passed = len(found) - len(skipped) - len(failed)
    if not found:
        if entry["result"] == "SKIP":
            return 0, [], [entry["name"]]
        return (1, [], []) if ran_ok else (0, [entry["name"]], [])
    if not ran_ok and not failed:  # died after its last case, or ran past its time
        failed = [f"{entry['name']}: {entry['result']}, exit {entry.get('returncode')}"]
    return passed, failed, skipped


def why(entry, lines=6, letters=800):
    """What it said after each case that failed: the end of that."""
    out, at = {}, None
    for line in (entry.get("stdout") or "").splitlines():
        m = CASE.match(line)
        if m:
            at = out.setdefault(m.group(2).strip(" -"), []) if m.group(1) == "not ok" else None
        elif at is not None and line.startswith("#"):
            at.append("    " + line[:letters])
    return [f"  {case}\n" + "\n".join(said[-lines:]) for case, said in out.items() if said]


def entries(path):
    with open(path, encoding="utf-8") as log:
        return [json.loads(line) for line in log]


def runs(paths):
    """The entries of FIRST[,AGAIN], the later one of each name; and the first of those that came out well only then."""
    first, *again = (entries(p) for p in paths.split(","))
    later = {e["name"]: e for e in (again[0] if again else [])}
    unsteady = [e for e in first if e["name"] in later and not cases(later[e["name"]])[1]]
    return [later.get(e["name"], e) for e in first], unsteady


def main():
    if sys.argv[1] == "--failed":
        print("\n".join(e["name"].rsplit(" / ", 1)[-1] for e in entries(sys.argv[2]) if cases(e)[1]))
        return 0
    passed, failed, skipped, unsteady, said = 0, ["a build"] * int(sys.argv[1]), [], [], []
    for paths in sys.argv[2:]:
        found, shaky = runs(paths)
        unsteady += [e["name"] for e in shaky]
        for entry in shaky + found:
            said += why(entry)
        for entry in found:
            p, f, s = cases(entry)
            passed += p
            failed += [f"{entry['name']}: {x}" for x in f]
            skipped += [f"{entry['name']}: {x}" for x in s]
    if said:
        print("what failed said:\n" + "\n".join(said))
    for title, names in (("failed", failed), ("unsteady", unsteady), ("skipped", skipped)):
        for name in names:
            print(f"{title}: {name}")
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or passed == 0 else 0


sys.exit(main())
