"""What searches found of one problem, whatever level and memory limit they were for, kept between commands."""
