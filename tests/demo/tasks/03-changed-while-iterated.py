def without_empty(table):
    for key in table:
        if not table[key]:
            del table[key]
    return table
# --- assertions
assert without_empty({"a": 1, "b": 0, "c": 2, "d": ""}) == {"a": 1, "c": 2}
assert without_empty({}) == {}
