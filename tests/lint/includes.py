#!/usr/bin/env python3
"""Who may include whom: the table of the design, held.

Each row: folder, the folders of this house it may include, the third-party headers it may include.
The longest folder that a file lies in is its row. Headers of libc and of the kernel are free, but for
the pure folders. Usage: includes.py ROOT; includes.py --self-test
"""
import os
import re
import sys

PLAIN = {"jansson", "uthash", "xxhash"}  # plain tools that any folder may use
BASE = {"common/base", "include"}

# folder: (own folders it may include, third parties beyond PLAIN)
TABLE = {
    "include": ({"include"}, set()),
    "common/base": (BASE, set()),
    "common/conf": (BASE | {"common/conf"}, set()),
    "common/proto": (BASE | {"common/proto"}, {"protobuf-c"}),
    "common/gpu": (BASE | {"common/gpu"}, {"cuda"}),
    "placement": (BASE | {"placement"}, set()),
    "kernels": (BASE | {"common/gpu", "kernels"}, {"cuda"}),
    "transport": ({"common", "include", "kernels", "transport"}, {"protobuf-c"}),
    "transport/tls": (BASE | {"common/conf", "transport/tls"}, {"openssl"}),
    "transport/http": ({"common", "include", "transport"}, {"curl", "microhttpd", "wslay", "openssl"}),
    "transport/link": ({"common", "include", "kernels", "transport"}, {"protobuf-c", "nccl", "cuda"}),
    "transport/fmt": ({"common", "include", "transport/fmt"}, {"zstd"}),
    "worker": ({"common", "include", "kernels", "transport", "worker"}, {"zip", "openssl", "protobuf-c"}),
    "worker/client": ({"common", "include", "kernels", "transport", "worker/client"}, {"protobuf-c"}),
    "worker/roles": (BASE | {"common/conf", "transport/fmt", "worker/roles"}, set()),
    "worker/roles/sglang": (BASE | {"common/conf", "transport/fmt", "transport/http", "worker/roles"}, set()),
    "head": ({"common", "include", "placement", "transport", "head"}, {"zip", "openssl", "protobuf-c"}),
    "head/journal": ({"common", "include", "placement", "head"}, {"sqlite3", "protobuf-c"}),
    "cli": ({"common", "include", "transport/http", "transport/tls", "cli"}, {"argp", "yaml"}),
    "examples": ({"include", "examples"}, set()),
    "python": ({"include", "python"}, {"python"}),
    "bench": (None, None),  # whole libraries
    "tests": (None, None),
}
# One file may do what its folder may not.
FILES = {"cli/plan.c": {"placement"}}
# One file of a folder, whichever it is, may include this library.
ONE_FILE = {"grpc": "transport/wire"}
# What a pure folder does without: I/O, clocks, threads, logs.
IMPURE = re.compile(r"^(common/base/(log|loop|file|muster|metrics|fault)\.h|time\.h|pthread\.h|unistd\.h|fcntl\.h|"
                    r"signal\.h|poll\.h|sys/.*|dirent\.h)$")
PURE = {"placement"}
# These need libc alone.
NO_PLAIN = {"include", "placement", "common/base"}

THIRD = [
    ("jansson", r"jansson\.h"), ("uthash", r"ut(hash|list|array|string)\.h"), ("xxhash", r"xxhash\.h"),
    ("protobuf-c", r"protobuf-c/.*"), ("grpc", r"grpc/.*"), ("curl", r"curl/.*"), ("microhttpd", r"microhttpd.*"),
    ("wslay", r"wslay/.*"), ("sqlite3", r"sqlite3.*"), ("zstd", r"zstd.*"), ("zip", r"zip.*"),
    ("openssl", r"openssl/.*"), ("nccl", r"nccl.*"), ("cuda", r"(cuda.*|nvml\.h|nv.*\.h)"), ("argp", r"argp\.h"), ("yaml", r"yaml\.h"),
    ("python", r"Python\.h"), ("cmocka", r"cmocka\.h"),
]
LIBC = re.compile(
    r"^(assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|setjmp|signal|stdalign|stdarg|"
    r"stdatomic|stdbool|stddef|stdint|stdio|stdlib|stdnoreturn|string|strings|tgmath|threads|time|uchar|wchar|wctype|"
    r"aio|cpio|dirent|dlfcn|elf|endian|byteswap|err|execinfo|fcntl|fnmatch|ftw|getopt|glob|grp|ifaddrs|langinfo|libgen|"
    r"link|malloc|mntent|mqueue|netdb|nl_types|poll|pthread|pty|pwd|regex|sched|search|semaphore|spawn|syslog|tar|"
    r"termios|ucontext|ulimit|unistd|utime|wordexp|immintrin|arm_neon|arm_sve|x86intrin|cpuid)\.h$|"
    r"^(sys|net|netinet|arpa|linux|asm|bits|sanitizer)/.+\.h$")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def longest(folders, path):
    best = None
    for f in folders:
        if path == f or path.startswith(f + "/"):
            if best is None or len(f) > len(best):
                best = f
    return best


def third_party(name):
    for party, pattern in THIRD:
        if re.fullmatch(pattern, name):
            return party
    return None


def resolve(name, quote, path, files):
    """The file of this house that an include means, or None."""
    for candidate in (os.path.join(os.path.dirname(path), name) if quote == '"' else None, name, "include/" + name):
        if candidate and os.path.normpath(candidate) in files:
            return os.path.normpath(candidate)
    generated = re.fullmatch(r"(?:.*/)?([a-z_]+)\.pb-c\.h", name)
    if generated:
        for f in files:
            if f.endswith("/" + generated.group(1) + ".proto"):
                return f
    return None


def check_one(path, text, files):
    """Sentences about what this file may not include."""
    row = longest(TABLE, path)
    if row is None:
        yield f"{path}: lies in no folder of the table"
        return
    own, third = TABLE[row]
    extra = FILES.get(path, set())
    for quote, name in INCLUDE.findall(text):
        to = resolve(name, quote, path, files)
        if row in PURE and IMPURE.match(to or name):
            yield f"{path}: {name} in a pure folder (no I/O, clock, thread, log)"
        if to is not None:
            if own is not None and longest(own | extra, to) is None:
                yield f"{path}: includes {to}; {row} may include {', '.join(sorted(own))}"
            continue
        party = third_party(name)
        if party is None:
            if not LIBC.match(name) and own is not None:
                yield f"{path}: {name} is neither ours, nor of libc, nor of a library in the table"
            continue
        if third is None or party in third | extra or (party in PLAIN and row not in NO_PLAIN):
            continue
        if ONE_FILE.get(party) == os.path.dirname(path):
            continue
        yield f"{path}: {name} ({party}) is not for {row}"


def check(files):
    out = []
    for path in sorted(files):
        if re.search(r"\.(c|h|cu|cuh)$", path):
            out += list(check_one(path, files[path], files))
    for party, folder in ONE_FILE.items():
        users = [p for p in sorted(files) if os.path.dirname(p) == folder and
                 any(third_party(name) == party for _, name in INCLUDE.findall(files[p]))]
        if len(users) > 1:
            out.append(f"{party} belongs into one file of {folder}, not into {', '.join(users)}")
    return out


def tree(root):
    files = {}
    for folder in sorted({f.split("/")[0] for f in TABLE}):
        for at, dirs, names in os.walk(os.path.join(root, folder)):
            dirs[:] = [d for d in dirs if not d.startswith((".", "build"))]
            for n in names:
                if re.search(r"\.(c|h|cu|cuh|proto)$", n):
                    p = os.path.join(at, n)
                    with open(p, encoding="utf-8", errors="replace") as f:
                        files[os.path.relpath(p, root)] = f.read()
    return files


SELF = [  # path, text, a part of what must be said or None
    ("placement/a.c", '#include "common/base/base.h"\n#include <stdio.h>', None),
    ("placement/a.c", '#include "common/base/loop.h"', "pure"),
    ("placement/a.c", "#include <time.h>", "pure"),
    ("placement/a.c", '#include "transport/wire/wire.h"', "placement may include"),
    ("placement/a.c", "#include <jansson.h>", "not for placement"),
    ("head/a.c", '#include "placement/placement.h"\n#include "transport/wire/wire.h"', None),
    ("head/a.c", '#include "worker/proc/proc.h"', "head may include"),
    ("head/a.c", "#include <sqlite3.h>", "not for head"),
    ("head/journal/a.c", "#include <sqlite3.h>", None),
    ("worker/a.c", '#include "head/journal/journal.h"', "worker may include"),
    ("worker/a.c", "#include <grpc/grpc.h>", "not for worker"),
    ("worker/client/a.c", '#include "worker/proc/proc.h"', "worker/client may include"),
    ("worker/roles/a.c", '#include "transport/wire/wire.h"', "worker/roles may include"),
    ("worker/roles/a.c", '#include "transport/http/http.h"', "worker/roles may include"),
    ("worker/roles/sglang/a.c", '#include "transport/http/http.h"', None),
    ("worker/roles/sglang/a.c", "#include <curl/curl.h>", "not for worker/roles/sglang"),
    ("worker/roles/a.c", '#include <furlong/furlong.h>\n#include "transport/fmt/f.h"\n#include <jansson.h>', None),
    ("transport/call/a.c", "#include <grpc/grpc.h>", "not for transport"),
    ("transport/wire/rpc.c", "#include <grpc/grpc.h>", None),
    ("transport/wire/a.c", '#include "node.pb-c.h"', None),
    ("common/base/a.c", '#include "node.pb-c.h"', "common/base may include"),
    ("cli/a.c", '#include "placement/placement.h"', "cli may include"),
    ("cli/plan.c", '#include "placement/placement.h"', None),
    ("examples/a.c", '#include "common/base/base.h"', "examples may include"),
    ("examples/a.c", "#include <furlong/furlong.h>", None),
    ("common/base/a.c", "#include <frobnicate.h>", "neither ours"),
    ("common/base/a.c", "  # include  <curl/curl.h>", "not for common/base"),
    ("tests/a.c", '#include "head/journal/journal.h"\n#include <cmocka.h>', None),
    ("stray/a.c", "", "no folder"),
]


def self_test():
    house = {p: "" for p in ("common/base/base.h", "common/base/loop.h", "transport/wire/wire.h", "transport/fmt/f.h", "transport/http/http.h",
                             "placement/placement.h", "worker/proc/proc.h", "head/journal/journal.h",
                             "include/furlong/furlong.h", "common/proto/node.proto")}
    bad = 0
    for path, text, wanted in SELF:
        said = list(check_one(path, text, house | {path: text}))
        good = (not said) if wanted is None else (len(said) == 1 and wanted in said[0])
        if not good:
            bad += 1
            print(f"self-test: {path} with {text!r}: wanted {wanted!r}, got {said}")
    twice = check(house | {"transport/wire/a.c": "#include <grpc/grpc.h>", "transport/wire/b.c": "#include <grpc/grpc.h>"})
    if len(twice) != 1 or "one file of transport/wire" not in twice[0]:
        bad += 1
        print(f"self-test: gRPC in two files: {twice}")
    return bad


def main():
    if sys.argv[1:] == ["--self-test"]:
        return 1 if self_test() else 0
    said = check(tree(sys.argv[1]))
    print("\n".join(said) if said else "every include is in the table")
    return 1 if said else 0


sys.exit(main())
