"""test_names.py FOLDER - stubs say what is there, and the module shows and needs what it may. In TAP."""
import ast
import importlib
import inspect
import os
import re
import subprocess
import sys

folder = sys.argv.pop(1)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from harness import main  # noqa: E402

import furlong  # noqa: E402

MODULES = ["", "._core", ".arena", ".blob", ".driver", ".errors", ".run", ".weights"]
IMPORTS = {"atexit", "json", "os", "threading", "read", "buffer"}  # what a module uses and does not show


def shown(name):
    return not name.startswith("_") or name in ("__version__", "__all__")


def stub(path):
    """name -> None, or for a class name -> {member: arguments or None}"""
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    out = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            out[node.name] = {m.name if hasattr(m, "name") else m.target.id: args(m) for m in node.body
                              if hasattr(m, "name") or isinstance(m, ast.AnnAssign)}
        elif isinstance(node, ast.FunctionDef):
            out[node.name] = args(node)
        elif isinstance(node, ast.AnnAssign):
            out[node.target.id] = None
        elif isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            assert ast.literal_eval(node.value) == furlong.__all__, "what a star takes along"
            out["__all__"] = None
        elif isinstance(node, ast.ImportFrom):
            out.update({a.asname: None for a in node.names if a.asname})
    return out


def args(node):
    if not isinstance(node, ast.FunctionDef) or any(getattr(d, "id", "") == "property" for d in node.decorator_list):
        return None
    named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs + [a for a in [node.args.kwarg] if a]
    return [a.arg for a in named]


def check_class(where, cls, said):
    wrong = []
    there = {n for n in vars(cls) if shown(n) and not n.startswith("__")}
    slots = set(getattr(cls, "__slots__", ()))
    for n in sorted(there - set(said)):
        wrong.append(f"{where}.{n} is not in the stub")
    for n, a in said.items():
        real = inspect.getattr_static(cls, n, None)
        if a is not None and real is None and n not in slots:
            wrong.append(f"{where}.{n} is in the stub alone")
        if a is not None and inspect.isfunction(real):
            got = [p for p in inspect.signature(real).parameters if p != "_"]
            if got != a:
                wrong.append(f"{where}.{n}: {a} in the stub, {got} in the code")
    return wrong


def check(suffix):
    module = importlib.import_module("furlong" + suffix)
    said = stub(os.path.join(folder, (suffix[1:] or "__init__") + ".pyi"))
    public = {n for n, v in vars(module).items() if shown(n) and n not in IMPORTS and not inspect.ismodule(v)
              and (getattr(v, "__module__", module.__name__) == module.__name__ or suffix == "" or not hasattr(v, "__module__"))}
    public -= {"BY_STATUS"} if suffix == ".run" else set()
    wrong = [f"{suffix}: {n} is not in the stub" for n in sorted(public - set(said)) if n not in said]
    for n, what in said.items():
        real = getattr(module, n, None)
        if real is None:
            wrong.append(f"{suffix}: {n} is in the stub alone")
        elif isinstance(what, dict):
            wrong += check_class(f"{suffix}.{n}", real, what)
        elif isinstance(what, list) and inspect.isfunction(real) and list(inspect.signature(real).parameters) != what:
            wrong.append(f"{suffix}.{n}: {what} in the stub, {list(inspect.signature(real).parameters)} in the code")
    return wrong


def test_stubs_say_what_is_there():
    wrong = [w for m in MODULES for w in check(m)]
    assert not wrong, "\n".join(wrong)
    assert os.path.exists(os.path.join(folder, "py.typed"))
    assert all(hasattr(furlong, n) for n in furlong.__all__)


def test_statuses_are_the_librarys():
    header = os.path.join(folder, "..", "..", "include", "furlong", "types.h")
    with open(header, encoding="utf-8") as f:
        names = re.findall(r"^    FL_(\w+)", f.read().split("enum fl_status {")[1].split("FL_STATUS_COUNT")[0], re.M)
    from furlong.errors import BY_STATUS
    assert len(names) == len(BY_STATUS) == furlong._core.STATUS_COUNT
    for i, name in enumerate(names[1:], 1):
        assert BY_STATUS[i].__name__ == name.title().replace("_", "") and BY_STATUS[i].status == i, name


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_module_shows_its_door_and_needs_the_library():
    path = furlong._core.__file__
    here = os.path.dirname(path)
    names = {x.split()[-1] for x in lines("nm", "-D", "--defined-only", path)} - {"_init", "_fini"}
    assert names == {"PyInit__core"}, names
    dynamic = "\n".join(lines("readelf", "-d", path, os.path.join(here, "libfurlong.so.1")))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    allowed = re.compile(r"libfurlong\.so\.1|libc\.so\.6|libm\.so\.6|ld-linux.*|lib[aut]san\.so\.\d+|libubsan\.so\.\d+|libpthread\.so\.0")
    assert needed and all(allowed.fullmatch(x) for x in needed), needed
    assert re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic)[0] == "$ORIGIN"
    undefined = lines("nm", "-D", "--undefined-only", path) + lines("nm", "-D", os.path.join(here, "libfurlong.so.1"))
    assert not [x for x in undefined if re.search(r"\b(grpc|protobuf|uv_)", x)]


def test_the_allocators_are_there():
    there = {x.split()[-1].split("@")[0] for x in lines("nm", "-D", "--defined-only",
                                                        os.path.join(os.path.dirname(furlong._core.__file__), "libfurlong.so.1"))}
    wanted = {"furlong_torch_alloc" + x for x in furlong.arena._TORCH.values()} | {"furlong_torch_free"}
    assert wanted <= there and set(furlong.arena._TORCH) == set(furlong.arena.TAGS), wanted - there


def test_the_limited_api_is_enough():
    if not furlong._core.__file__.endswith(".abi3.so"):
        return  # the plain build for 3.10
    private = [x.split()[-1] for x in lines("nm", "-D", "--undefined-only", furlong._core.__file__) if re.search(r" _Py", x)]
    stable = {"_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_Dealloc", "_PyArg_ParseTuple_SizeT",
              "_PyObject_CallMethod_SizeT", "_Py_BuildValue_SizeT"}  # in the stable ABI under these names
    assert set(private) <= stable, private


if __name__ == "__main__":
    main(globals())
