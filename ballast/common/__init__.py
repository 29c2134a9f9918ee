"""Plain types shared by every service and the simulator. Standard library only."""
