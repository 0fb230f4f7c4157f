def balanced(debits, credits):
    return sum(debits) == sum(credits)
# --- assertions
assert balanced([0.1, 0.2], [0.3])
assert not balanced([0.1], [0.2])
