"""build_wheel.py BUILD [OUT] - the wheels of furlong-runtime, from a build folder that ninja has made

One for CPython 3.11 and newer (abi3) and one for each older interpreter that the build has a module for. The folder
BUILD/python/furlong, zipped, with the metadata that pip wants; no build tool but this file. Prints what it wrote."""
import base64
import hashlib
import os
import platform
import re
import stat
import subprocess
import sys
import zipfile

NAME = "furlong_runtime"
METADATA = """Metadata-Version: 2.1
Name: furlong-runtime
Version: {version}
Summary: A process' seat in a Furlong run: calls, weights, memory that can go and come back
License: Apache-2.0
Requires-Python: {python}
Description-Content-Type: text/markdown

{readme}"""
WHEEL = "Wheel-Version: 1.0\nGenerator: build_wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n"


def glibc(paths):
    """The newest glibc that one of the files asks for: the wheel's tag says so, and pip checks it."""
    wanted = (2, 17)
    for path in paths:
        text = subprocess.run(["readelf", "-V", path], check=True, capture_output=True, text=True).stdout
        wanted = max([wanted] + [(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", text)])
    return wanted


def kind_of(module):
    """(tag of interpreter and ABI, Requires-Python) of a module by its name."""
    if module.endswith(".abi3.so"):
        return "cp311-abi3", ">=3.11"
    version = re.match(r"_core\.cpython-(\d)(\d+)-", module)
    if not version:
        sys.exit(f"{module}: no module that this script knows")
    a, b = version.groups()
    return f"cp{a}{b}-cp{a}{b}", f"=={a}.{b}.*"


def record(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def put(z, name, data, executable=False):
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bytes from the same build
    info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    z.writestr(info, data)
    return record(name, data)


def build(folder, module, out):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "README.md"), encoding="utf-8") as f:
        readme = f.read()
    with open(os.path.join(folder, "..", "version"), encoding="ascii") as f:
        version = f.read().strip()
    tag, python = kind_of(module)
    libraries = [os.path.join(folder, x) for x in (module, "libfurlong.so.1")]
    a, b = glibc(libraries)
    tag = f"{tag}-manylinux_{a}_{b}_{platform.machine()}"
    info = f"{NAME}-{version}.dist-info"
    path = os.path.join(out, f"{NAME}-{version}-{tag}.whl")
    names = sorted(x for x in os.listdir(folder) if x.endswith((".py", ".pyi", ".typed"))) + [module, "libfurlong.so.1"]
    with zipfile.ZipFile(path + ".part", "w") as z:
        lines = ""
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                lines += put(z, f"furlong/{name}", f.read(), ".so" in name)
        lines += put(z, f"{info}/METADATA", METADATA.format(version=version, python=python, readme=readme).encode())
        lines += put(z, f"{info}/WHEEL", WHEEL.format(tag=tag).encode())
        put(z, f"{info}/RECORD", (lines + f"{info}/RECORD,,\n").encode())
    os.rename(path + ".part", path)
    return path


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder, out = os.path.join(sys.argv[1], "python", "furlong"), sys.argv[2] if len(sys.argv) > 2 else "."
    inside = os.listdir(folder) if os.path.isdir(folder) else []
    modules = sorted(x for x in inside if x.startswith("_core.") and x.endswith(".so"))
    if not modules:
        sys.exit(f"{folder} holds no module: run ninja, and see -Dpython_for")
    os.makedirs(out, exist_ok=True)
    for module in modules:
        print(build(folder, module, out))


if __name__ == "__main__":
    main()
