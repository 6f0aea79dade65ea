# Reads docs/test-ids.tsv, then Rust sources and scenarios. Prints every id with the tests that prove it, or why there is none, and
# fails where neither is there. Rust: a comment `// ids: CIP-1 CIP-2` before a function, or a test's name that begins
# with an id (`cip_1_…`). Scenarios: `ids: [CIP-1, CIP-2]` of a step.

function fault(text) { print "hack/test ids: " text > "/dev/stderr"; faults++ }

function covers(list, test,    ids, n, i) {
    n = split(list, ids, /[ ,]+/)
    for (i = 1; i <= n; i++) {
        if (ids[i] == "") continue
        if (!(ids[i] in meaning)) { fault(test " names " ids[i] ", which docs/test-ids.tsv does not have"); continue }
        if (index(tests[ids[i]] "; ", test "; ") == 0) tests[ids[i]] = tests[ids[i]] (tests[ids[i]] == "" ? "" : "; ") test
    }
}

FNR == NR {
    if (/^#/) next
    fields = split($0, field, "\t")
    if (fields < 2 || fields > 3 || field[1] !~ /^[A-Z]+-[0-9]+$/ || field[2] == "") fault("docs/test-ids.tsv:" FNR ": not an id, a tab and its meaning")
    if (field[1] in meaning) fault("docs/test-ids.tsv:" FNR ": " field[1] " is there twice")
    order[++count] = field[1]
    meaning[field[1]] = field[2]
    note[field[1]] = field[3]
    group = field[1]
    sub(/-.*/, "", group)
    groups[tolower(group)] = group
    next
}

FNR == 1 {
    if (pending != "") fault(file ": no function follows // ids: " pending)
    pending = ""; test_follows = 0; file = FILENAME
}

FILENAME ~ /\.yaml$/ {
    if (match($0, /^- what: /)) step = substr($0, RLENGTH + 1)
    if (match($0, /^  ids: \[/)) { list = substr($0, RLENGTH + 1); sub(/\].*/, "", list); covers(list, file ": " step) }
    next
}

/^ *\/\/ ids: / { sub(/^ *\/\/ ids: /, ""); pending = pending " " $0; next }
/^ *#\[(tokio::)?test/ { test_follows = 1; next }
/^ *(pub |pub\(crate\) )?(async )?fn [a-z]/ {
    name = $0
    sub(/^.*fn /, "", name); sub(/[^a-z0-9_].*/, "", name)
    if (pending != "") covers(pending, file ": " name)
    if (test_follows && split(name, part, "_") > 1 && part[1] in groups && part[2] ~ /^[0-9]+$/) covers(groups[part[1]] "-" part[2], file ": " name)
    pending = ""; test_follows = 0
}

END {
    if (pending != "") fault(file ": no function follows // ids: " pending)
    for (i = 1; i <= count; i++) {
        id = order[i]
        if (tests[id] != "") {
            covered++
            print id "\t" meaning[id] "\n\t\t" tests[id]
            if (note[id] != "") fault(id " has tests: take '" note[id] "' out of docs/test-ids.tsv")
        } else if (note[id] != "") {
            excused++
            print id "\t" meaning[id] "\n\t\tnone: " note[id]
        } else fault(id " (" meaning[id] ") is proved by no test")
    }
    printf "%d behaviours: %d proved, %d excused\n", count, covered, excused
    exit faults > 0
}
