"""Write and read schedules as text and pictures: CSV, JSON, grid, instruction streams, SVG, Chrome trace."""
