"""The server's half of Preheat: everything that reaches the Truss image. Imports nothing from engine_builder."""
