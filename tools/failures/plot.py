"""Lines in panels, as SVG."""
import html
import math

COLORS = ("#7f7f7f", "#d62728", "#1f77b4", "#2ca02c")
WIDTH, HEIGHT, LEFT, TOP, GAP = 430, 250, 62, 62, 75


def nice_step(span):
    """1, 2 or 5 times a power of ten, for at most eight intervals."""
    power = 10.0 ** math.floor(math.log10(span / 8))
    return next(step * power for step in (1, 2, 5, 10) if span <= 8.001 * step * power)


def ticks(low, high):
    step = nice_step(high - low)
    first = round(low / step)
    return [round(i * step, 9) for i in range(first, round(high / step) + 1) if low - 1e-9 <= i * step <= high + 1e-9]


def text(x, y, content, anchor="middle", style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{html.escape(content)}</text>'


def panel(x0, y0, title, x_values, lines, low):
    """lines: [(label, y values)]; what lies below `low` leaves the picture."""
    x_top = max(x_values)

    def place(x, y):
        return x0 + WIDTH * x / x_top, y0 + HEIGHT * (100 - y) / (100 - low)

    parts = [text(x0, y0 - 10, title, "start", 'font-weight="bold"')]
    for x in ticks(0, x_top):
        parts.append(text(place(x, 0)[0], y0 + HEIGHT + 17, f"{x:g}"))
    for y in ticks(low, 100):
        height = place(0, y)[1]
        parts.append(f'<path d="M{x0} {height:.1f}h{WIDTH}" stroke="#e5e5e5"/>')
        parts.append(text(x0 - 6, height + 4, f"{y:g}", "end"))
    parts.append(f'<svg x="{x0}" y="{y0 - 2}" width="{WIDTH + 3}" height="{HEIGHT + 4}" '
                 f'viewBox="{x0} {y0 - 2} {WIDTH + 3} {HEIGHT + 4}">')
    for i, (_, values) in enumerate(lines):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(x_values, values))
        # Equal lines: the earlier are wider, so that each can be seen.
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[i]}" '
                     f'stroke-width="{2 + 0.9 * (len(lines) - 1 - i):.1f}"/>')
    return [*parts, "</svg>"]


def draw(rows, x_values, x_label, y_label):
    """rows of panels (title, [(label, y values in %)]), with the same labels in all. Returns the SVG."""
    parts = []
    columns = max(map(len, rows))
    width, height = LEFT + columns * (WIDTH + GAP), TOP + len(rows) * (HEIGHT + GAP)
    for i, (label, _) in enumerate(rows[0][0][1]):
        x = LEFT + i * (width - LEFT) / len(COLORS)
        parts.append(f'<path d="M{x:.1f} 18h22" stroke="{COLORS[i]}" stroke-width="3"/>')
        parts.append(text(x + 28, 22, label, "start"))
    for row, panels in enumerate(rows):
        for column, (title, lines) in enumerate(panels):
            x, y = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
            # The lowest line may fall far below the others and would flatten them.
            lows = sorted(min(values) for _, values in lines)
            span = max(1, min(100, 1.15 * (100 - lows[1])))
            step = nice_step(span)
            low = max(0, 100 - step * math.ceil(span / step))
            parts += panel(x, y, title, x_values, lines, low)
            parts.append(text(x + WIDTH / 2, y + HEIGHT + 36, x_label))
            if column == 0:
                parts.append(text(0, 0, y_label, style=f'transform="translate({x - 44} {y + HEIGHT / 2}) rotate(-90)"'))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12" fill="#333">\n<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(parts) + "\n</svg>\n")
