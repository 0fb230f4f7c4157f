def is_weekend(day):
    return day == "saturday" or "sunday"
# --- assertions
assert is_weekend("sunday")
assert is_weekend("saturday")
assert not is_weekend("monday")
