def histogram(words):
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
# --- assertions
assert histogram(["a", "b", "a"]) == {"a": 2, "b": 1}
