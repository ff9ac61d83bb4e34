"""test_wheel.py BUILD RIG - the wheel, installed where nothing else is, and the face under its daemon from there."""
import os
import subprocess
import sys
import zipfile

build, rig = sys.argv[1:3]
del sys.argv[1:3]
here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "..", "cluster"))
from harness import SLOW, Skip, main, place  # noqa: E402


def run(*command, env=None):
    r = subprocess.run(command, capture_output=True, text=True, timeout=300 * SLOW, env=env, stdin=subprocess.DEVNULL)
    assert r.returncode == 0, f"{' '.join(command)}: exit {r.returncode}\n{r.stdout[-3000:]}\n{r.stderr[-3000:]}"
    return r.stdout


def wheels(out):
    return run(sys.executable, os.path.join(here, "..", "..", "python", "build_wheel.py"), build, out).split()


def test_a_wheel_says_what_is_in_it():
    with place() as p:
        for path in wheels(f"{p.root}/a"):
            with zipfile.ZipFile(path) as z:
                names = z.namelist()
                assert z.testzip() is None and {"furlong/py.typed", "furlong/libfurlong.so.1", "furlong/run.pyi"} <= set(names)
                info = names[-1].rsplit("/", 1)[0]
                recorded = {line.split(",")[0] for line in z.read(f"{info}/RECORD").decode().splitlines()}
                assert recorded == set(names), recorded ^ set(names)
                tag = z.read(f"{info}/WHEEL").decode().split("Tag: ")[1].strip()
                assert path.endswith(f"-{tag}.whl") and "manylinux_2_" in tag, (path, tag)
                assert not [n for n in names if n.endswith((".c", ".h", ".o"))]
        again = {os.path.basename(x): x for x in wheels(f"{p.root}/b")}
        for name, path in again.items():
            with open(path, "rb") as b, open(f"{p.root}/a/{name}", "rb") as a:
                assert a.read() == b.read(), f"{name} differs from build to build"


def test_an_empty_build_is_refused():
    with place() as p:
        r = subprocess.run([sys.executable, os.path.join(here, "..", "..", "python", "build_wheel.py"), p.root], capture_output=True, text=True)
        assert r.returncode == 1 and "holds no module" in r.stderr, r


def test_it_works_where_it_is_installed():
    with place() as p:
        found = [w for w in wheels(f"{p.root}/dist") if "abi3" in w]
        if not found or sys.version_info < (3, 11):
            raise Skip("no wheel for this interpreter")
        run(sys.executable, "-m", "venv", f"{p.root}/venv")
        python = f"{p.root}/venv/bin/python3"
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        run(python, "-m", "pip", "install", "-q", "--no-index", found[0], env={**env, "PIP_FIND_LINKS": ""})
        where = run(python, "-c", "import furlong; print(furlong._core.__file__)", env=env).strip()
        assert where.startswith(f"{p.root}/venv/lib"), where
        told = run(rig, python, os.path.join(here, "test_face.py"), "the_seat", "an_ask_and_its_answer", "tensors_that_differ",
                   "the_run_is_left_at_exit", env=env)
        assert told.count("\nok ") == 4, told


if __name__ == "__main__":
    main(globals())
