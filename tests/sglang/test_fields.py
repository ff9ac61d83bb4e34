"""The fields that this house sends to SGLang and reads of it, against the newest release on PyPI."""
import ast
import glob
import os
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fields  # noqa: beside this file

bad = []


def check(ok, text):
    if not ok:
        bad.append(text)


def members(tree):
    """class: the names it declares, with those of its bases in the same file."""
    own = {c.name: ({s.target.id for s in c.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)},
                    [b.id for b in c.bases if isinstance(b, ast.Name)]) for c in tree.body if isinstance(c, ast.ClassDef)}

    def all_of(name):
        if name not in own:
            return set()
        return own[name][0].union(*(all_of(b) for b in own[name][1]))
    return {name: all_of(name) for name in own}


def words(text):
    return {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def names(text):
    return {n.target.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def compare(wheel):
    z = zipfile.ZipFile(wheel)
    read = {n: z.read(n).decode() for n in z.namelist() if n.startswith("sglang/srt/") and n.endswith(".py")}
    one = lambda end: next(t for n, t in read.items() if n.endswith(end))  # noqa: a word for a line
    structs = members(ast.parse(one("srt/managers/io_struct.py")))
    for path, (name, wanted) in {**fields.REQUESTS}.items():
        check(wanted <= structs.get(name, set()), f"{path}: {name} has no {sorted(wanted - structs.get(name, set()))}")
    for path, (name, wanted) in fields.ANSWERS.items():
        check(wanted <= structs.get(name, set()), f"{path}: {name} has no {sorted(wanted - structs.get(name, set()))}")
    pause = next(c for c in ast.parse(one("srt/managers/io_struct.py")).body
                 if isinstance(c, ast.ClassDef) and c.name == "PauseGenerationReqInput")
    check(fields.PAUSES <= words(ast.unparse(pause)), "modes of a pause")
    check(fields.TAGS <= words(one("srt/constants.py")), "tags of memory")
    sampling = one("srt/sampling/sampling_params.py")
    check(fields.SAMPLING <= names(sampling), f"sampling_params has no {sorted(fields.SAMPLING - names(sampling))}")
    served = words(one("srt/entrypoints/http_server.py"))
    paths = set(fields.REQUESTS) | fields.GET | {"/flush_cache"}
    check(paths <= served, f"paths that are gone: {sorted(paths - served)}")
    check(fields.MODEL_INFO | fields.SERVER_INFO <= served, "members of /model_info and /server_info")
    made = words(one("srt/managers/tokenizer_manager.py")).union(*(words(t) for n, t in read.items() if "weight_version" in n))
    check(fields.META <= made, f"meta_info has no {sorted(fields.META - made)}")
    check({"output_token_logprobs", "input_token_logprobs", "prompt_token_ids"} <= made, "logprobs and tokens of the prompt")
    args = set().union(*(names(t) for n, t in read.items() if "server_args" in n or "/arg_groups/" in n))
    check(fields.SERVER_ARGS <= args, f"server arguments have no {sorted(fields.SERVER_ARGS - args)}")
    updater = next(t for t in read.values() if "in self.custom_weight_loaders" in t)
    check("dynamic_import(load_format)" in updater and "custom_loader(self" in updater, "how a custom loader is called")


def main():
    print("1..1", flush=True)
    with tempfile.TemporaryDirectory(prefix="fl-") as d:
        got = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", d,
                              "--disable-pip-version-check", "sglang"], capture_output=True, text=True, timeout=300)
        wheels = glob.glob(f"{d}/sglang-*.whl")
        if not wheels:
            said = (got.stderr.strip().splitlines() or ["pip gave nothing"])[-1]
            print(f"ok 1 - fields # SKIP no wheel of sglang to be had: {said}")
            return 0
        print(f"# {os.path.basename(wheels[0])}")
        compare(wheels[0])
    for line in bad:
        print(f"# {line}")
    print(f"{'not ok' if bad else 'ok'} 1 - fields")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
