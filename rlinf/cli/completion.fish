# Completion of rlinf: asks it with the line up to the cursor. No answer leaves the shell's own completion of files.
complete -c rlinf -n 'test -n "$(rlinf --complete "$(commandline -cp)" 2>/dev/null)"' -f \
  -a '(rlinf --complete "$(commandline -cp)" 2>/dev/null)'
