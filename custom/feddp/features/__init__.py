"""Features that the networks of finished runs compute for pixels, and the divergence of foreground and background."""
