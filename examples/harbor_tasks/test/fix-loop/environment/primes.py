import sys

number, found = 2, []
while number <= int(sys.argv[1]):
    if all(number % prime for prime in found):
        found.append(number)
        number += 1
print(*found)
