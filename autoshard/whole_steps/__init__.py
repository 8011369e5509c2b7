"""What published training steps say of a prediction: rates under load by software, and error bands of whole steps."""
