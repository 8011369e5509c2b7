"""What published training steps say of a prediction: rates under load by software, and how sure a whole step is."""
