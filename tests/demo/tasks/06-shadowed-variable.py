def table(rows):
    lines = []
    for row in rows:
        width = 0
        for row in row:
            width += len(str(row))
        lines.append((row, width))
    return lines
# --- assertions
assert table([[1, 22], [333]]) == [([1, 22], 3), ([333], 3)]
