collect_ignore = ["script.py", "titan.py"]  # scripts: titan.py takes a CPU for the accelerator of its process
