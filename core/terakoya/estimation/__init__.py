"""What a run will take, told without training: parameters, operations, memory of each rank, disk, hours."""
