from preheat.main import main

main()
