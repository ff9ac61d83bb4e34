#!/usr/bin/env python3
"""Joins page.html, page.css and the scripts into one page, and writes it as a C file.

Usage: join.py page.html page.css SCRIPT... OUT.c
The policy that goes with it allows its own script and style by their digests, and nothing else. What would make the
page ask somebody else for something, or grow beyond its bound, ends the build."""
import base64
import hashlib
import re
import sys

PAGE_MAX_BYTES = 96 << 10
OUTSIDE = re.compile(r"""https?://(?!www\.w3\.org/)|@import|url\(\s*['"]?(?!data:|#)|\bsrc\s*=|innerHTML|insertAdjacentHTML|\beval\(""")


def digest(text):
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def join(html, css, js):
    for mark in ("/*STYLE*/", "/*SCRIPT*/"):
        if html.count(mark) != 1:
            raise ValueError(f"page.html must hold {mark} once")
    if "</" in js or "</" in css:
        raise ValueError("page.js and page.css must not hold '</': a browser would end the element there")
    page = html.replace("/*STYLE*/", css).replace("/*SCRIPT*/", js)
    found = OUTSIDE.search(page)
    if found:
        raise ValueError(f"the page must hold nothing from outside and no markup from text: {found.group(0)!r}")
    if len(page.encode()) > PAGE_MAX_BYTES:
        raise ValueError(f"the page has {len(page.encode())} bytes, at most {PAGE_MAX_BYTES} are allowed")
    policy = f"default-src 'none'; script-src {digest(js)}; style-src {digest(css)}; img-src data:; connect-src 'self'"
    return page, policy


def c_file(page, policy):
    data = page.encode()
    rows = [", ".join(str(b) for b in data[i:i + 24]) for i in range(0, len(data), 24)]
    return ('/* made by join.py */\n#include "head/web/web.h"\n\nstatic const unsigned char html[] = {\n    '
            + ",\n    ".join(rows) + "\n};\n\n"
            f'const struct web_page web_page = {{ {{ html, sizeof(html) }}, "{policy}" }};\n')


def main():
    texts = []
    for path in sys.argv[1:-1]:
        with open(path, encoding="utf-8") as f:
            texts.append(f.read())
    try:
        page, policy = join(texts[0], texts[1], "\n".join(texts[2:]))
    except ValueError as e:
        sys.exit(f"join.py: {e}")
    with open(sys.argv[-1], "w", encoding="ascii") as f:
        f.write(c_file(page, policy))


if __name__ == "__main__":
    main()
