"""What takes a minute: a server that answers nothing any more is given up by the adapter itself."""
from test_sglang import harness, log, paths, place, run


def test_a_deaf_server():
    with place() as p:
        r = run(p, server=[f"$(test -e {p.root}/second || echo --fault=deaf:2; touch {p.root}/second)"], flags=["--max-restarts=2"])
        r.go(seconds=180)
        text = log(p, r)
        assert len(r.steps()) == 2 and "answered none of 3 looks" in text and "no answer in" not in text, text
        assert paths(p).count("/server_info") == 2 and p.left_behind() == []


if __name__ == "__main__":
    harness.main(dict(globals()))
