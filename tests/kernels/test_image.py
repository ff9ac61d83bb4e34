"""test_image.py LIBRARY LAUNCH.C ARCH... - the device code in a library that ships: machine code for each ARCH (compute capability as
two or three digits) and, of the first, PTX for what comes later; every kernel in each. In TAP.

A fatbin is a header and entries, each with a header of its own: kind (1 PTX, 2 ELF), its size, that of what follows, and at byte 28
the capability. What is compressed (flag 0x8000) is not looked into."""
import re
import struct
import sys

library, launch, archs = sys.argv[1], sys.argv[2], [int(x) for x in sys.argv[3:]]
PTX, ELF, COMPRESSED = 1, 2, 0x8000


def entries(data):
    at = data.find(struct.pack("<IHH", 0xBA55ED50, 1, 16))
    assert at >= 0, f"{library} holds no fatbin"
    end = at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
    at += 16
    while at < end:
        kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
        arch, = struct.unpack_from("<I", data, at + 28)
        flags, = struct.unpack_from("<Q", data, at + 40)
        yield kind, arch, None if flags & COMPRESSED else data[at + head:at + head + size]
        at += head + size


def main():
    with open(library, "rb") as f:
        found = list(entries(f.read()))
    with open(launch, encoding="utf-8") as f:
        kernels = sorted(set(re.findall(r'"(furlong_\w+)"', f.read())))
    print("TAP version 13\n1..2")
    there = sorted((kind, arch) for kind, arch, _ in found)
    wanted = sorted([(ELF, a) for a in archs] + [(PTX, archs[0])])
    say = lambda pairs: ", ".join(("PTX of " if k == PTX else "sm_") + str(a) for k, a in pairs)  # noqa: E731
    print("ok" if there == wanted else "not ok", f"1 - each_device_has_its_code\n# {say(there)}; asked for: {say(wanted)}")
    missing = [f"sm_{arch}: {k}" for kind, arch, code in found if code is not None for k in kernels if f".text.{k}\0".encode() not in code]
    looked = any(kind == ELF and code is not None for kind, _, code in found)
    whole = looked and bool(kernels) and not missing
    said = ", ".join(missing or kernels) if looked else "all of it is compressed: nothing was looked at"
    print("ok" if whole else "not ok", f"2 - every_kernel_is_in_it\n# {said}")
    return there != wanted or not whole


sys.exit(main())
