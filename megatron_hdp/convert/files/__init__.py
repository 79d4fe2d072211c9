"""Files of either side, read and written tensor by tensor, and the folder where they are made."""
