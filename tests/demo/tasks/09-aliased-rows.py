def board(size):
    return [[0] * size] * size


def mark(grid, row, column):
    grid[row][column] = 1
    return grid
# --- assertions
assert mark(board(2), 0, 1) == [[0, 1], [0, 0]]
assert board(3) == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
