def multipliers(count):
    return [lambda number: number * factor for factor in range(count)]
# --- assertions
assert [multiply(10) for multiply in multipliers(4)] == [0, 10, 20, 30]
