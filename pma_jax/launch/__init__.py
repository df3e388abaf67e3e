"""Many runs from one configuration: their names and commands, and the engines that start them."""
