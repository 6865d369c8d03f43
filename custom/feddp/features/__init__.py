"""What the networks of finished runs make of pixels, and how far apart it puts foreground and background."""
