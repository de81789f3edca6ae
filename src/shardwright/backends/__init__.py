"""What one kind of device or of communication needs beyond what torch gives."""
