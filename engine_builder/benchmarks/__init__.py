"""What is measured, how it is kept, and the page that shows it."""
