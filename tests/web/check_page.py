#!/usr/bin/env python3
"""The page as a file: well-formed, nothing from outside, within its bound, and what can be heard without eyes.

Usage: check_page.py JOIN.PY PAGE.HTML PAGE.CSS SCRIPT...; check_page.py JOIN.PY --self-test"""
import html.parser
import importlib.util
import re
import sys

VOID = {"meta", "link", "input", "br", "hr", "img", "base", "col", "wbr"}
REFERS = ["aria-labelledby", "aria-describedby", "aria-controls", "for"]


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.all, self.said, self.texts = [], [], [], {}

    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        if len(d) != len(attrs):
            self.said.append(f"<{tag}> has an attribute twice")
        node = {"tag": tag, "attrs": d, "inside": [n["tag"] for n in self.open], "text": ""}
        self.all.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1]["tag"] != tag:
            self.said.append(f"line {self.getpos()[0]}: </{tag}> closes <{self.open[-1]['tag'] if self.open else 'nothing'}>")
        else:
            self.open.pop()

    def handle_data(self, data):
        for n in self.open:
            n["text"] += data


def check(page):
    r = Reader()
    r.feed(page)
    r.close()
    said = r.said + [f"<{n['tag']}> is never closed" for n in r.open]
    ids = [n["attrs"]["id"] for n in r.all if "id" in n["attrs"]]
    said += [f"id {i} is there twice" for i in set(ids) if ids.count(i) > 1]
    if not page.lower().startswith("<!doctype html>"):
        said.append("no doctype")
    if not any(n["tag"] == "html" and n["attrs"].get("lang") for n in r.all):
        said.append("the language is not said")
    for n in r.all:
        a, tag = n["attrs"], n["tag"]
        said += [f"<{tag}> has {k}: {a[k]} and no such id" for k in REFERS for i in a.get(k, "").split() if i not in ids]
        if a.get("href", "").startswith("#") and not a["href"].startswith("#/") and a["href"][1:] not in ids:
            said.append(f"a link to {a['href']}, which is nowhere")
        said += [f"<{tag} {k}>: a handler or a style in an attribute is refused by the policy" for k in a if k.startswith("on") or k == "style"]
        said += [f"<{tag} {k}={v[:40]}> asks somebody else" for k, v in a.items() if k in ("src", "srcset", "data", "action")
                 or (k == "href" and not v.startswith(("#", "data:")))]
        if tag in ("input", "select", "textarea") and "label" not in n["inside"] and not a.get("aria-label"):
            said.append(f"<{tag} id={a.get('id')}> has no label")
        if tag == "table" and not re.search(r"<caption", page[page.find("<table"):]):
            said.append("a table without a caption")
        if tag == "nav" and not (a.get("aria-label") or a.get("aria-labelledby")):
            said.append("<nav> without a name")
        if tag == "section" and not a.get("aria-labelledby"):
            said.append("<section> without a name")
        if tag == "button" and not n["text"].strip() and not a.get("aria-label"):
            said.append("<button> without a name")
        if tag == "th" and a.get("scope") not in ("col", "row"):
            said.append("<th> without its scope")
    said += [f"{n} landmarks <{t}>, one is wanted" for t in ("header", "main") for n in [sum(x["tag"] == t for x in r.all)] if n != 1]
    tables = sum(n["tag"] == "table" for n in r.all)
    if tables != sum(n["tag"] == "caption" for n in r.all):
        said.append("a table without a caption")
    level = 0
    for n in r.all:
        if re.fullmatch(r"h[1-6]", n["tag"]) and "dialog" not in n["inside"]:
            if int(n["tag"][1]) > level + 1:
                said.append(f"<{n['tag']}> {n['text'].strip()!r} follows a heading of level {level}")
            level = int(n["tag"][1])
    return said


GOOD = "<!doctype html><html lang=en><head><title>x</title></head><body><header></header><main><h1>a</h1>%s</main></body></html>"
SELF = [("", 0), ("<p>x</b></p>", 1), ("<p>", 1), ("<input id=a>", 1), ("<label>x<input></label>", 0), ("<h3>deep</h3>", 1),
        ("<p id=a></p><p id=a></p>", 1), ("<img src='https://x.org/a.png'>", 1), ("<p onclick='x'></p>", 1), ("<nav></nav>", 1),
        ("<a href='#none'>x</a>", 1), ("<button></button>", 1), ("<section aria-labelledby=q></section>", 1), ("<main></main>", 1)]


def main():
    spec = importlib.util.spec_from_file_location("join", sys.argv[1])
    join = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(join)
    if sys.argv[2:] == ["--self-test"]:
        bad = [f"self-test: {x!r} said {got}" for x, n in SELF for got in [check(GOOD % x)] if bool(got) != bool(n)]
        for css, js in (("@import 'x'", ""), ("", "fetch('https://x.org')"), ("", "x.innerHTML = 1"), ("", "'</script>'"), ("", "x" * (join.PAGE_MAX_BYTES + 1)),
                        ("p { background: url(http://x) }", "")):
            try:
                join.join("/*STYLE*/ /*SCRIPT*/", css, js)
                bad.append(f"join takes {(css or js)[:40]}")
            except ValueError:
                pass
        print("\n".join(bad))
        return bool(bad)
    texts = [open(p, encoding="utf-8").read() for p in sys.argv[2:]]
    page, policy = join.join(texts[0], texts[1], "\n".join(texts[2:]))
    said = check(page)
    said += [] if len(policy) < 256 else [f"the policy has {len(policy)} bytes, and a header 255 at most"]
    print("\n".join(said) if said else f"the page is well-formed, {len(page.encode())} of {join.PAGE_MAX_BYTES} bytes")
    return bool(said)


sys.exit(main())
