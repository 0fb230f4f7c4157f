def power(base, exponent):
    if exponent == 0:
        return 0
    half = power(base, exponent // 2)
    return half * half * (base if exponent % 2 else 1)
# --- assertions
assert power(2, 10) == 1024
assert power(3, 0) == 1
assert power(5, 3) == 125
