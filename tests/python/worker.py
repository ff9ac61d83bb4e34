"""What the driver of test_face.py launches: `worker.py serve | trainer | engine | quits | leaves | forks`."""
import array
import os
import signal
import sys
import threading

import furlong

SHAPES = {"a": (64, 33), "b": (7,), "c": (1 << 16,)}
held = []
DEVICE = 0 if "--device" in sys.argv else None


def rss_kib():
    with open("/proc/self/smaps_rollup", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Pss_Anon"))


def twice(ev):
    ev.reply({"first": True})
    try:
        ev.reply({"second": True})
    except furlong.Invalid as e:
        held.append(str(e))
        return
    held.append("a second answer was taken")


def boom(ev):
    raise ValueError("no such thing as " + ev.json()["x"])


def old(ev):
    raise furlong.Stale("version 3 was asked for, 5 serves")


def hold(ev):
    held.append(ev)
    return furlong.LATER


def drop(ev):
    return furlong.LATER  # and nobody keeps it


def release(ev):
    for x in held:
        if isinstance(x, furlong.Event):
            x.reply({"released": True})
    held.clear()


def denied(ev):
    try:
        ev.run.place({"trainer": 1})
    except furlong.Denied as e:
        return {"refused": str(e)}
    return {}


common = {
    "echo": lambda ev: (ev.body, ev.blob),
    "swap": lambda ev: (None, bytes(ev.blob[::-1])),
    "who": lambda ev: {"rank": ev.run.rank, "role": ev.run.role, "world": ev.run.world, "from": ev.sender, "pid": os.getpid()},
    "boom": boom, "old": old, "twice": twice, "hold": hold, "drop": drop, "release": release, "denied": denied,
    "held": lambda ev: [x if isinstance(x, str) else {"unwanted": x.unwanted} for x in held],
    "memory": lambda ev: {"kib": rss_kib()},
    "bad": lambda ev: object(),
}


def serve(run):
    side = threading.Thread(target=run.serve, args=(common,), kwargs={"lane": 1}, daemon=True)
    side.start()
    run.serve(common)


def trainer(run):
    first = {name: array.array("f", [1.0]) * furlong.blob._count(shape) for name, shape in SHAPES.items()}
    if "--in-place" in sys.argv:
        own = {n: run.arena.empty(s, "F32", "weights", device=0) for n, s in SHAPES.items()}
        w = run.weights.offer([(n, (v.pointer, "F32", SHAPES[n])) for n, v in own.items()], in_place=True)
        held.append(own)
    else:
        w = run.weights.offer([(n, (memoryview(a), "F32", SHAPES[n])) for n, a in first.items()], device=DEVICE)
    if "--mute" not in sys.argv:
        w.publish(0)

    def train(ev):
        v = ev.json()["version"]
        w.begin(v, wait=ev.budget)
        for name in SHAPES:
            memoryview(w.data(name)).cast("B").cast("f")[:] = array.array("f", [v]) * furlong.blob._count(SHAPES[name])
        w.publish(v)
        return {"version": w.version}

    def misuse(ev):
        view = w.last("a")
        out = {}
        for what, do in {"write": lambda: memoryview(view).cast("B").__setitem__(0, 1), "drop": w.drop, "leave": run.leave,
                         "begun": lambda: w.publish(7), "name": lambda: w.data("z"), "number": lambda: w.data(3),
                         "commit": lambda: w.commit(ev)}.items():
            try:
                do()
                out[what] = "taken"
            except Exception as e:  # noqa: the driver looks at it
                out[what] = f"{type(e).__name__}: {e}"
            if ev.answered:
                return None
        return out

    def hurry(ev):
        try:
            w.begin(ev.json()["version"], wait=0.0)
        except furlong.Timeout:
            return {"late": True}

    def stuck(ev):
        """Nobody is there any more who could grant it; the main thread ends all the same."""
        ev.reply()
        held.append(w.last("a"))  # so that drop() is refused in any case, and says how far the thread is
        side = threading.Thread(target=lambda: w.begin(ev.json()["version"], wait=None), daemon=True)
        side.start()
        while side.is_alive():
            try:
                w.drop()
            except furlong.Again:
                sys.exit(0)
            except furlong.Invalid:
                continue

    run.serve({**common, "train": train, "misuse": misuse, "stuck": stuck, "hurry": hurry})


def engine(run):
    shapes = SHAPES if "--other" not in sys.argv else {**SHAPES, "b": (8,)}
    w = run.weights.accept({n: ("F32", s) for n, s in shapes.items()}, device=DEVICE)
    seen = []

    def commit(ev):
        if "breaks" in held:
            raise ValueError("no room for it here")
        w.commit(ev)
        seen.append(ev.version)

    def look(ev):
        if w.version is None:
            return {"version": None, "data": w.data("a") is None}
        ends = {n: [memoryview(w.data(n)).cast("B").cast("f")[i] for i in (0, -1)] for n in SHAPES}
        return {"version": w.version, "digest": w.digest, "ends": ends, "commits": len(seen), "readonly": w.data("b").readonly}

    run.serve({**common, "commit": commit, "look": look, "break": lambda ev: held.append("breaks")})


def quits(run):
    """Ends its main thread while another waits: the run is left before the interpreter goes."""
    threading.Thread(target=run.serve, args=(common,), daemon=True).start()
    run.ask("driver", 0, "nothing", budget=0.0) if "--ask" in sys.argv else None
    with open(os.path.join(run.run_dir, "quit"), "w", encoding="utf-8") as f:
        f.write("by itself")


def interrupted(run):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        run.next()
    except KeyboardInterrupt:
        sys.exit(7)


if __name__ == "__main__":
    {"serve": serve, "trainer": trainer, "engine": engine, "quits": quits, "interrupted": interrupted}[sys.argv[1]](furlong.join())
