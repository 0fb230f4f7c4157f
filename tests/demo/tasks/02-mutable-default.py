def collect(item, into=[]):
    into.append(item)
    return into
# --- assertions
assert collect(1) == [1]
assert collect(2) == [2]
assert collect(3, [0]) == [0, 3]
