# Completion of rlinf: asks it with the line up to the cursor. No answer leaves the shell's own completion of files.
_rlinf() {
  local -a found=("${(@f)$("${words[1]}" --complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
  [[ -z "$found" ]] && { compset -P '*='; _files; return }
  compadd -S '' -- ${(M)found:#*[=.]}
  compadd -- ${found:#*[=.]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _rlinf rlinf
