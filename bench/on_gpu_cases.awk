# Each case of weight updates (F) and of offload and resume (G) once, by the TAP of all test programs: a test names
# its case first, pNN_what_it_says. A case passed where one of its tests did and none failed. Exit 1: one failed, or
# none of its tests was there.
BEGIN {
    n = split("P70 P71 P72 P73 P74 P75 P76 P77 P78 P80 P81 P82 P83 P84 P85 P86 P112 P113 P114 P120 P121 P125 " \
              "P88 P89 P90 P91 P92 P93 P94 P95", ids, " ")
    elsewhere["P90"] = "no device in it: the server of tests/sglang stands in, in the suite"
    elsewhere["P92"] = "no device in it: a keeper and a loader, tests/worker in the suite"
    elsewhere["P93"] = "no device in it: the server of tests/sglang stands in, in the suite"
}
function case_of(line) {
    if (!match(line, /p[0-9]+_/))
        return ""
    return "P" substr(line, RSTART + 1, RLENGTH - 2)
}
/^(not )?ok |^1\.\.0 # SKIP / {
    id = case_of($0)
    if (id == "")
        next
    if ($1 == "not")
        failed[id]++
    else if (match($0, /# SKIP.*/)) {
        skipped[id]++
        why[id] = substr($0, RSTART + 7)
    } else
        passed[id]++
}
END {
    print "# case  on this machine"
    for (i = 1; i <= n; i++) {
        id = ids[i]
        if (failed[id])
            say = "FAILED " failed[id] " of " failed[id] + passed[id] + 0
        else if (passed[id])
            say = "passed (" passed[id] (skipped[id] ? ", " skipped[id] " skipped: " why[id] : "") ")"
        else if (skipped[id])
            say = "SKIP " why[id]
        else if (id in elsewhere)
            say = "SKIP " elsewhere[id]
        else
            say = "FAILED: no test of it was run"
        bad += say ~ /^FAILED/
        printf "# %-5s %s\n", id, say
    }
    exit bad > 0
}
