"""What is done with releases: publish, sign, copy, collect what nothing names."""
