def find(items, wanted):
    low, high = 0, len(items) - 1
    while low < high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1
# --- assertions
assert find([1, 3, 5, 7, 9], 9) == 4
assert find([1, 3, 5, 7, 9], 1) == 0
assert find([4], 4) == 0
assert find([1, 3, 5], 2) == -1
