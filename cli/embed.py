#!/usr/bin/env python3
"""Writes files as a C table (cli/external.h), so that the command has them wherever it was copied to.

Usage: embed.py FILE... OUT.c"""
import os
import sys


def rows(data):
    return ",\n    ".join(", ".join(str(b) for b in data[i:i + 24]) for i in range(0, len(data), 24))


def main(files, out):
    text, table = '/* made by embed.py */\n#include "cli/external.h"\n\n', []
    for i, path in enumerate(files):
        with open(path, "rb") as f:
            data = f.read()
        text += f"static const unsigned char file{i}[] = {{\n    {rows(data)}\n}};\n"
        table.append(f'    {{ .name = "external_ray/{os.path.basename(path)}", .data = file{i}, .len = sizeof(file{i}), .mode = 0{os.stat(path).st_mode & 0o777:o} }},\n')
    with open(out, "w", encoding="ascii") as f:
        f.write(text + "\nconst struct ray_pack_file external_files[] = {\n" + "".join(table) + f"}};\nconst size_t external_n_files = {len(files)};\n")


main(sys.argv[1:-1], sys.argv[-1])
